"""A way into vLLM's server for token ids, past everything that it does for text: no JSON of ids, no models of requests.

Runs in vLLM's environment, as a middleware of its web application. A request is a line of JSON and then the prompt's
ids; an answer is a line of JSON, then the sampled ids and the processed log-probability of each. Ids are 32-bit whole
numbers, log-probabilities 32-bit floats, as this machine orders their bytes. Behind them are the experts that tokens
went to, from the first that was asked for to the last but one, as an array in numpy's format, if the request asks for
them and the server runs with --enable-return-routed-experts.
"""

import asyncio
import io
import itertools
import json
from array import array
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

PATH = "/offbook/tokens"
_numbers = itertools.count()


class Tokens:
    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        work = asyncio.ensure_future(_sample(scope["app"].state, body))
        gone = asyncio.ensure_future(receive())  # nothing comes any more but the end of the connection
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()  # vLLM drops the request
            return
        status = 200
        answer = b""
        try:
            answer = work.result()
        except ValueError as error:  # what vLLM raises for a request that it does not take
            status = 400
            answer = str(error).encode()
        except Exception as error:  # an engine that is dead: offbook starts another server
            status = 500
            answer = f"{type(error).__name__}: {error}".encode()
        length = str(len(answer)).encode()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": answer})


async def _sample(state: Any, body: bytes) -> bytes:
    line, _, prompt = body.partition(b"\n")
    asked = json.loads(line)
    ids = array("i", prompt).tolist()
    adapter = None
    if asked["adapter"]:
        adapter = state.openai_serving_models.lora_requests.get(asked["adapter"])
        if adapter is None:
            raise ValueError(f"there is no adapter {asked['adapter']}")
    params = SamplingParams(
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
        stop_token_ids=asked["stop_ids"],
        ignore_eos=True,  # the stop ids are all that ends a message
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **({"routed_experts_prompt_start": asked["experts_from"]} if "experts_from" in asked else {}),
    )
    prompt_input = tokens_input(ids, cache_salt=asked["salt"])
    outputs = state.engine_client.generate(prompt_input, params, f"offbook-{next(_numbers)}", lora_request=adapter)
    final = [output async for output in outputs][-1]
    if final.prompt_token_ids != ids:
        raise RuntimeError("vLLM continued another prompt")
    (output,) = final.outputs
    sampled = list(output.token_ids)
    flat = output.logprobs
    starts = flat.start_indices if flat is not None else []
    if [flat.token_ids[start] for start in starts] != sampled:
        raise RuntimeError("vLLM sent log-probabilities of other tokens than it sampled")
    logprobs = array("f", [flat.logprobs[start] for start in starts])
    experts = io.BytesIO()
    if "experts_from" in asked and getattr(output, "routed_experts", None) is not None:
        np.save(experts, output.routed_experts, allow_pickle=False)
    about = json.dumps({"finish": output.finish_reason, "tokens": len(sampled), "experts": experts.tell()})
    return about.encode() + b"\n" + array("i", sampled).tobytes() + logprobs.tobytes() + experts.getvalue()
