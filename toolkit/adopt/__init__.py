"""Turn configurations of other tools into an experiment of this toolkit: ``launch/adopt.py``."""
