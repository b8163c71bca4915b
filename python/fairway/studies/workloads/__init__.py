"""Programs for chips of the scheduled network, on real data: :mod:`.program` builds them."""

__all__ = ["COLLECTIVES", "WORKLOADS"]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")

WORKLOADS = {
    **{name: f"{name}:64MiB" for name in COLLECTIVES},
    "matmul": "matmul:800x32576x8192, [m x k] times [k x n] over all chips",
    "cholesky": "cholesky:10240, of n x n",
    "bert": "bert:24, a pipeline of 24 encoders of BERT-Large over all chips",
    "failover": "failover:7, nodes of a dragonfly that die under an all-reduce, and are replaced",
    "uniform": "uniform:400, 400 vectors from each chip to random others, without a schedule",
}
"""Workloads that can be simulated, each with an example."""
