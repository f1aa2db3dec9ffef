"""What agents ask of a model and what it answers, kept to the token: rollouts of any agent behind an endpoint."""

from offbook.agent.recorder.said import Answer, Asked, Refused, Said, Shown
from offbook.agent.recorder.session import Over, Session
from offbook.agent.recorder.track import Track
