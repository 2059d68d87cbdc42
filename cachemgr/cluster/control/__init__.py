"""The control service: what nodes say to each other beside the bytes of blocks, and whom they speak to.

    server         answers;  `listings` makes long answers in parts
    peers, peer    all other nodes, each with a `client`, a bulk channel and a breaker
    peer_calls     a call that ends in time, whatever happens;  `latency` what it took lately
    messages       one struct per request and reply;  `packed` names, addresses and arcs as bytes
    trouble        how a call can fail
    grpc_service   carries them; alone imports grpc
    host_token     whether two nodes can map each other's arenas

Threads: the IO thread.
"""
