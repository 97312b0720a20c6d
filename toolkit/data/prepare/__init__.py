"""From text to a data folder: in parallel, in bounded memory, and the same bytes however often it was killed.

    store.py      an input in a store, brought here
    plan.py       what there is to read, cut into units; the recipe: the settings that decide bytes
    read.py       a unit of any format -> documents, in order
    vocabulary.py the tokenizer: given, or trained on a sample
    tokenise.py   first pass: a unit -> parts, each sorted by key
    parts.py      files of a part and their receipt
    merge.py      second pass: a range of keys of all parts -> a shard
    work.py       tasks over processes
    report.py     statistics, histogram, manifest
    run.py        all of it, resumable
    inspect.py    what a data folder is

A document's key is a hash of its content and, unless equal documents are removed, of where it stood; shards hold documents by
ascending key. So neither units, parts, memory nor processes decide where a document comes to stand: the order is the
sorted one, and equal keys are equal documents.
"""
