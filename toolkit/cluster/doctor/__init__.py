"""Pre-flight checks of launch/doctor.py, on each machine and across machines.

types.py        DoctorCheck, CheckFinding, RunRequirements and the report types
timeout.py      run a call that may hang in a process that can be abandoned
software.py host.py disk.py network.py gpus.py
                one machine: measurements and pure judges
cross_node.py   several machines: uniformity, clocks, links (pure)
clocks.py       measure clock offsets
preflight.py    run the checks and gather the reports
report.py       the table and the JSON
"""
