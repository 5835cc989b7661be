"""The step without a learning rate, ``step="auto"``: each file is one part of it, and they work in this order.

- ``replay`` keeps the minibatches of a step, to run the model on them again: ``calls`` are what they were, ``reading`` finds
  what the criterion read of them, ``witness`` a gradient scaler, ``fingerprint`` whether data are the same as before.
- ``proposal`` is the direction: ``orthogonal`` equalises its strengths, ``proportions`` says how far each layer goes;
  ``stacks`` are layers of one shape, which do so together.
- ``quadratic`` is the length, from the model of the loss along ``directions``, with weight decay in it (``penalty``), and
  the judge of what the last steps did; ``bounce`` lengthens steps where that costs nothing.
- ``moving`` takes the step, ``rest`` averages where steps led, and ``report`` is what one step leaves to the next.
- ``descent`` is the step as a whole.
"""
