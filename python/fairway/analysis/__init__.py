"""What is predicted of captured steps, rung by rung."""
