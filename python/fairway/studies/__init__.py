"""Studies of the papers: their workloads and figures. The product does not import them."""
