"""Prepare a data folder from text: in parallel, in bounded memory, and resumable with the same bytes.

    input_store.py     copies an input from a store to this machine
    plan.py            lists the input and cuts it into work units; the recipe: settings that determine bytes
    input_file.py, text_formats.py, hf_dataset.py, read.py
                       a work unit of any format -> documents, in order
    tokenizer.py       the tokenizer: installed, or trained on a sample
    document_keys.py   sort keys of documents, and their split
    tokenise.py        first pass: a work unit -> parts, each sorted by key
    parts.py           files of a part and their receipt
    merge.py           second pass: a range of keys of all parts -> a shard
    input_changes.py   updates a plan whose input changed
    worker_pool.py     tasks over processes
    report.py          statistics, histogram, manifest
    run.py             all of it, resumable
    import_megatron.py a manifest for existing Megatron files
    inspect.py         verifies and describes a data folder

A document's key is a hash of its content and, unless duplicates are removed, of its source and position.
Shards contain documents by ascending key. So neither units, parts, memory nor processes affect the order of
documents, and equal keys are equal documents.
"""
