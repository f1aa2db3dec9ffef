"""The configuration: what can be set, and how files and options become it."""

from offbook.config.files import (
    RETIRED,
    ConfigError,
    load_config,
    recipe_for,
    recipes,
    shipped_models,
    with_new_keys,
)
from offbook.config.judging import (
    AuditorConfig,
    EffortConfig,
    FeedbackConfig,
    JudgeConfig,
    MonitorsConfig,
    RewardsConfig,
)
from offbook.config.methods import CorrectionsConfig, TeachersConfig
from offbook.config.running import EvalConfig, LiveConfig
from offbook.config.section import LOCAL, Precision
from offbook.config.stages import PretrainConfig, SftConfig, StageConfig
from offbook.config.training import CheckpointConfig, LinearConfig, LoraConfig, MtpConfig, RanksConfig, TrainConfig
from offbook.config.tree import Config, cache_folder, is_url
from offbook.config.verbs import refuse_mistaken, refuse_without_effect
from offbook.config.world import EngineConfig, HarnessConfig, SandboxConfig, TasksConfig, ToolsConfig, VllmConfig
