from .configuration_dspine import DSpineConfig


__all__ = ["DSpineConfig"]
