"""The Triton side: requests in, tokens out."""
