"""Pre-flight: what launch/doctor.py looks at, on each machine and between them.

types.py      what is looked at (Check), what was found (Finding), what the run needs (Need)
timeout.py    a question that may hang, in a process that may be left behind
software.py host.py disk.py network.py gpus.py      one machine: facts, how they are measured, and the judgement of them (pure)
cross_node.py several machines: alike, clocks, links (pure);  clocks.py  how clocks are compared
examine.py    who looks when;  show.py  the table and the JSON
"""
