"""What observes a run: metrics, status, health, system samples, the step-time ledger and the watchdog."""
