"""Warm processes that have done their imports and take the places of failed ranks.

standby_pool.py       the standbys of one owner: the supervisor of plain python, or the standby server
standby_server.py     owns the standbys of a node under torchrun
standby_socket.py     how ranks find that server
rank_assignment.py    the message that turns a standby into a rank
relay.py              a worker of torchrun's agent that has handed its place to a standby
"""
