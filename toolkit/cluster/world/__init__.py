"""What a process finds out about its launch, sets for its libraries, and exchanges with the other ranks.

environment.py            the launcher, and the rank, nodes and hosts that it has set
node_range.py             the numbers of nodes of an elastic run
machine_info.py           GPUs, memory and cores of this machine
process_environment.py    the variables that libraries read; network_interface.py finds the interface for gloo
rendezvous.py             messages between ranks, and the process group
"""
