"""The models and tasks of this project, which experiments name by their dotted path: see conf/exp."""
