"""What is measured during training, how it is judged, and where it is written."""
