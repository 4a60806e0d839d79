from dspine.configuration_dspine.configuration_dspine import DSpineConfig


__all__ = ["DSpineConfig"]
