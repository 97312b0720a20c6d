"""Tokenised shards, and an order over them that is a pure function of the position."""
