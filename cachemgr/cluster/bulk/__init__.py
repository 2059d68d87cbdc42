"""The bulk channel: shards from arena to arena, over TCP or, on one host, copied where they lie.

    server             lets in who has one of the `tickets`;  `server_connection` serves one client
    ├ server_calls     what is asked for, answered;  `outgoing` sends from arenas, within a `send_budget`
    └ transfer_leases  keep blocks pinned while they travel, and no longer
    client             `get` and `put` of a peer;  `client_channel` a connection, `client_calls` what is asked
    ├ opening          through the door that the control service named
    ├ incoming         into reserved slots, checked while hot;  `same_host` copied from the peer's arena
    └ watch            deadlines of answers
    channel            what both ends have: `inbox` and `outbox` of frames
    frames             what lies on the wire, and what trouble is;  `messages`, `hello` what is in it
    streams, ages      sockets, plain and encrypted; how long encrypted ones live

Threads: the IO thread.
"""
