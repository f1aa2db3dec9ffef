"""The configuration: what can be set, and how files and options become it."""

from offbook.core.config.files import (
    ConfigError,
    load_config,
    recipe_for,
    recipes,
    shipped_models,
)
from offbook.core.config.judging import (
    EFFORT_KINDS,
    JUDGED,
    EffortConfig,
    FeedbackConfig,
    JudgeConfig,
    MonitorsConfig,
    RewardsConfig,
    TeachersConfig,
)
from offbook.core.config.running import EvalConfig, LiveConfig
from offbook.core.config.section import Precision
from offbook.core.config.stages import PretrainConfig, SftConfig, StageConfig
from offbook.core.config.training import CheckpointConfig, LinearConfig, LoraConfig, MtpConfig, RanksConfig, TrainConfig
from offbook.core.config.tree import Config, cache_folder, is_url
from offbook.core.config.verbs import refuse_without_effect
from offbook.core.config.world import EngineConfig, HarnessConfig, SandboxConfig, TasksConfig, ToolsConfig, VllmConfig
