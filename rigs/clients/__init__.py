"""Programs of other packages, unmodified, each wrapped by one line of mpx.

`python -m rigs.clients` runs them all in the environment that `make clients` makes,
and writes `results.json` and the table of `docs/works-with.md`. The programs that need
no package beyond those of the tests run in the test suite, too.

To add a program, write a function in the module of its package in `programs/`:

    @client(linear=True)
    def two_towers(key):
        from some_package import TwoTowers  # heavy imports inside of the function

        model = TwoTowers(width=32, key=key)

        def loss(model, users, items):
            scores = model(users, items)
            return jnp.mean(scores**2), scores  # a float32 scalar, and any tree

        return loss, model, (normal(key, 8, 32), normal(key, 8, 32))

`linear=True` says that it has matrix products of data with weights, which a recipe can
quantize. A new package gets a line in `programs.PACKAGES`, in the extra `clients` of
`pyproject.toml` and, with `make clients-lock`, in `constraints.txt` beside this file.

What must hold of every program stands in `goals`; what is measured in `measure`, on
several devices in `layouts`, and of exported weights in `exports`.
"""
