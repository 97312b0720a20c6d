"""Checkpoints in an object store.

    PREFIX/latest                                  the pointer: which checkpoint is the newest, and who writes
    PREFIX/step-00000100-0f1e2d3c4b5a/             12 digits of the hash of manifest.json
        part-00000.safetensors                     as in ``checkpoints/step-00000100`` of the run's folder
        manifest.json                              uploaded last

Readers trust only the pointer. It is replaced after every object of its checkpoint has been verified, so that
a writer killed at any moment leaves the earlier checkpoint loadable. The folder's name contains the hash, so
a step that is repeated with another result never overwrites a checkpoint.

``pointer.py`` decides who may write and what the pointer names, ``source.py`` opens a checkpoint,
``files.py`` reads ranges of its files, ``upload.py`` sends one, its ranks coordinate through
``upload_folder.py``, and ``retention.py`` removes old ones.
"""
