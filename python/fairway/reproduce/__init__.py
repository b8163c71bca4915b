"""The figures of the papers, made anew: one module for each paper."""
