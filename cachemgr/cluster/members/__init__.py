"""Where nodes learn of each other and of rings: a static list with gossip, or Redis."""
