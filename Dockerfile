# verl's image with verl and this plugin. In the checkout:
#   docker build -t verl-oar .
#   docker run --rm -it --gpus all --shm-size=10g -v "$PWD":/workspace -w /workspace verl-oar

# The image of verl 0.9.0: the target of its docker/Dockerfile.stable.vllm, in which its own tests run. It has torch, vLLM and
# flash-attn, but no verl. Other tags are at https://hub.docker.com/r/verlai/verl; set both arguments.
ARG VERL_IMAGE=verlai/verl:vllm024.dev2
FROM ${VERL_IMAGE}

# As verl's own tests do in this image: what verl 0.9.0 requires and the image lacks.
ARG VERL_VERSION=0.9.0
RUN python3 -m pip install --no-cache-dir "verl==${VERL_VERSION}" transformers==5.5.3 TransferQueue==0.1.8

# The plugin and what recipes need: the line of recipes/CLUSTERS.md, "Prepare the nodes".
COPY . /opt/oar_plugin
RUN python3 -m pip install --no-cache-dir --no-deps /opt/oar_plugin -r /opt/oar_plugin/recipes/requirements.txt

# A build has no GPU: 3 means that nothing is missing, and that the GPUs were not checked.
RUN oar doctor || test $? -eq 3

CMD ["bash"]
