"""Records what any agent asks of a model behind an endpoint, and the answers, token by token, as rollouts."""

from offbook.agent.recorder.session import Answer, Asked, Over, Recorder, Refused, Said, Shown
