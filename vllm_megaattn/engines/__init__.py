"""Plugins for serving engines: they put the projection of this package behind an engine's own attention layers.

    common.py      what every plugin needs: the off switch, naming the device of a layer, warming it up
    gates.py       the conditions under which a layer may be served by us, one table, with the reason of every refusal
    report.py      what the user reads in the log: each reason once, and one summary of a model
    weights.py     keeping a checkpoint's MXFP8 bytes through an engine's loading and re-loading of weights
    projection.py  the whole projection handed through an engine's wo_b layer in place of z
    imports.py     running a function when a module has been imported
    vllm/          the vLLM plugin
    sglang/        the SGLang plugin

The shared modules import no engine. A plugin's own modules are imported by its entry point alone.
"""
