# The quickstart in a container: docker build -t offbook . && docker run --rm -v "$PWD/runs:/home/agent/runs" offbook
# Boxes are bubblewrap's and need user namespaces; where the host forbids them, see docs/sandbox.md.
FROM python:3.11-slim

RUN useradd --create-home agent
WORKDIR /home/agent
COPY --chown=agent:agent pyproject.toml constraints.txt README.md LICENSE ./offbook/
COPY --chown=agent:agent src ./offbook/src
# torch first and for the CPU: the one that others ask for brings gigabytes of CUDA packages.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11" \
    && pip install --no-cache-dir ./offbook

USER agent
ENTRYPOINT ["offbook"]
CMD ["quickstart"]
