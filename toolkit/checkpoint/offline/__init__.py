"""From a checkpoint of any format to one of any format, outside training: ``launch/reshard.py``."""
