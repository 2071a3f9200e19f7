"""A small mixture-of-experts transformer that trains on any machine; ``hybrid-ep demo`` runs it.

text        bytes of Python's standard library, to learn from and held out
model       the transformer, its feed-forwards on one Buffer
training    what a rank does, with
  one_process   the distributed layer beside plain arithmetic
  clock         a Buffer that times its communication
  collectives   sums and means over the ranks
report      what rank 0 saw, in lines and bars
picture     the same, drawn
"""
