"""The read side: missing blocks of a prompt are brought from the nodes that should have them.

    reads          the step loop's door, thread-safe
    fetcher        segment by segment, once per block;  `joined_gets` one request for what goes to one peer
    candidates     whom to ask, in which order
    read_repair    who should have had a block gets it
    hot_keys       what is read too often, and who then has it too;  `hot_spread` gives it to them

Threads: the IO thread, but for `reads`.
"""
