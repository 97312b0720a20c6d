"""What a user may write, typed; and how it is composed. No torch, no engine."""
