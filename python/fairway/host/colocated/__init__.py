"""Python functions of clients that run beside a host, next to their arrays (``colocated_python``).

A client's functions run in one process of that client on each host (:mod:`.host`,
:mod:`.process`), which has JAX with CPU devices in place of the host's (:mod:`.devices`), and the
modules that the client has sent along (:mod:`.shipped`). Host and process exchange messages and
shards (:mod:`.line`).
"""
