"""Nodes that share their caches: what one computed, any restores.

    contract         what the parts promise each other;  `settings` how a node takes part
    node             one node of the cluster: its IO thread, and how the parts hang together
    ├ rings          the ring in force and the one before; static_members, redis_members: where they come from
    ├ fetcher        brings missing blocks of a prompt into the host tier, from whom the ring says
    ├ replicator     gives committed blocks to their owners;  `mover`, `repair`, `balance` keep them there
    ├ peers, peer    the other nodes, each behind a `breaker`
    ├ control_…      the control service, gRPC with `messages`;  `grpc_service` alone imports grpc
    └ bulk_…         the bulk channel: `frames` over `streams`, opened by `tickets`, held by `transfer_leases`;
                     `same_host` reads arenas instead

Threads: one IO thread with one asyncio loop owns all of this; `HostStore` is what it shares with the step loop.
"""
