"""What a configuration needs and how long it takes at least, without a GPU; ``hybrid-ep plan``.

plan             memory, traffic and floors of time of one configuration, with
  random_load      how random routing loads ranks and links
pipeline_model   the chunks of a dispatch across nodes, simulated
scaling          both on growing numbers of nodes
scaling_tables   the same for people and as JSON
"""
