from transformers import AutoConfig, AutoModel

from .configuration_dspine import DSpineConfig
from .generation_dspine import DSpineGenerateOutput, DSpineStatistics, dspine_generate
from .modeling_dspine import DSpineModel, DSpineModelOutput, DSpinePreTrainedModel, DSpineProposal
from .registry_dspine import implementation_report, use_implementation


__version__ = "0.1.0.dev0"

# with the package installed, Auto classes use it even where a checkpoint brings its own copy of the code
AutoConfig.register(DSpineConfig.model_type, DSpineConfig, exist_ok=True)
AutoModel.register(DSpineConfig, DSpineModel, exist_ok=True)

__all__ = [
    "DSpineConfig",
    "DSpineGenerateOutput",
    "DSpineModel",
    "DSpineModelOutput",
    "DSpinePreTrainedModel",
    "DSpineProposal",
    "DSpineStatistics",
    "dspine_generate",
    "implementation_report",
    "use_implementation",
]
