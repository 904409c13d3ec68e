"""Two models: a student, and a teacher that is its running average (EMA)."""

import jax
import jax.numpy as jnp
import optax

import mpx

SIZE = 256
x = jax.random.normal(jax.random.key(1), (32, SIZE))
optimizer = optax.sgd(0.1)


def distill(student, teacher, x):
    def run(model):
        return jnp.tanh(x @ model["first"]) @ model["last"]

    return jnp.mean((run(student) - jax.lax.stop_gradient(run(teacher))) ** 2)


names = jax.random.split(jax.random.key(2), 2)
student = {
    name: jax.random.normal(key, (SIZE, SIZE)) / 16
    for name, key in zip(("first", "last"), names, strict=True)
}
teacher = jax.tree.map(lambda w: w + 0.01, student)
distilled = mpx.autocast(distill, recipe=mpx.Float8CurrentScaling(), weights=(0, 1))
scaling = mpx.init_scaling(distilled, student, teacher, x)
assert [use.parameter for use in scaling.quantized] == ["['first']", "[1]['first']"]


@jax.jit
def step(student, teacher, opt_state, scaling, x):
    result = mpx.value_and_grad(distilled, scaling)(student, teacher, x)
    student, opt_state, scaling = mpx.optimizer_step(
        student, optimizer, opt_state, result
    )
    averaged = optax.incremental_update(student, teacher, 0.01)
    teacher = mpx.select_tree(result.finite, averaged, teacher)
    return student, teacher, opt_state, scaling


before = teacher
student, teacher, _, scaling = step(
    student, teacher, optimizer.init(student), scaling, x
)
assert scaling.finite and not (teacher["first"] == before["first"]).all()
bad = step(student, teacher, optimizer.init(student), scaling, x.at[0].set(jnp.nan))
assert (bad[1]["first"] == teacher["first"]).all()
print("loss was bad, and the teacher stayed as it was")
