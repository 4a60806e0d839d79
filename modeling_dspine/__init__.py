import transformers
from packaging.version import Version

from .configuration_dspine import DSpineConfig
from .registry_dspine import implementation_report, use_implementation


__version__ = "0.1.0.dev0"
__all__ = ["DSpineConfig", "implementation_report", "use_implementation"]

if Version(transformers.__version__) >= Version("5.17"):
    from transformers import AutoConfig, AutoModel

    from .generation_dspine import DSpineGenerateOutput, DSpineStatistics, dspine_generate
    from .modeling_dspine import DSpineModel, DSpineModelOutput, DSpinePreTrainedModel, DSpineProposal

    __all__ += ["DSpineGenerateOutput", "DSpineStatistics", "dspine_generate"]
    __all__ += ["DSpineModel", "DSpineModelOutput", "DSpinePreTrainedModel", "DSpineProposal"]

    # with the package installed, Auto classes use it even where a checkpoint brings its own copy of the code
    AutoConfig.register(DSpineConfig.model_type, DSpineConfig, exist_ok=True)
    AutoModel.register(DSpineConfig, DSpineModel, exist_ok=True)
else:
    # serving engines pin older releases and need only the operations (`reference_dspine.py`), not the model
    def __getattr__(name: str):
        raise ImportError(
            f"dspine.modeling_dspine.{name} needs transformers 5.17 or later, found {transformers.__version__}"
        )
