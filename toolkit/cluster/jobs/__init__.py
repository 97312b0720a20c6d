"""Jobs as seen from outside their ranks.

job.py, submission.py                       plan a job and submit it; the protocol of a backend
backends/                                   one module per cluster
requeue.py, requeue_after_node_loss.py      run at the end of a Slurm job, and decide whether it continues
pod.py, health.py                           the entry point of a Kubernetes pod; the health of a container
slurm_controller.py                         requests to Slurm from inside a job
rendezvous_server.py                        where the agents of an elastic job meet
"""
