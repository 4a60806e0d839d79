"""DSpine checkpoints in stock SGLang: `plugin` registers everything, `worker` drives a round, `model` is the drafter.

Nothing is imported here: SGLang loads `plugin:register` through the entry point group `sglang.srt.plugins`, and the other modules
import SGLang, which not every installation of this package has.
"""
