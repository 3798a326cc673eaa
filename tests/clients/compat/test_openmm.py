"""OpenMM's forces on its CUDA platform, compared with those of its Reference platform."""

import numpy
import pytest
from openmm import Context, Platform, app, unit
import openmm

# Median difference of forces, relative to their size: the bound of OpenMM's own test of an installation.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def water():
    model = app.Modeller(app.Topology(), [])
    field = app.ForceField("tip3p.xml")
    model.addSolvent(field, boxSize=openmm.Vec3(2, 2, 2) * unit.nanometer)
    return model, field


def results(system, positions, platform, properties={}):
    integrator = openmm.VerletIntegrator(0.001)
    context = Context(system, integrator, Platform.getPlatformByName(platform), properties)
    context.setPositions(positions)
    first = context.getState(forces=True, energy=True)
    integrator.step(5)
    last = context.getState(positions=True)
    return (
        first.getForces(asNumpy=True)._value,
        first.getPotentialEnergy()._value,
        last.getPositions(asNumpy=True)._value,
    )


def compare(system, positions, precision="mixed"):
    forces, energy, moved = results(system, positions, "CUDA", {"Precision": precision})
    expected, expected_energy, expected_moved = results(system, positions, "Reference")
    errors = numpy.linalg.norm(forces - expected, axis=1) / numpy.linalg.norm(expected, axis=1)
    assert numpy.median(errors) < TOLERANCE
    assert abs(energy - expected_energy) < TOLERANCE * abs(expected_energy)
    numpy.testing.assert_allclose(moved, expected_moved, atol=1e-4)


def test_bonds():
    system = openmm.System()
    bonds, angles, torsions = openmm.HarmonicBondForce(), openmm.HarmonicAngleForce(), openmm.PeriodicTorsionForce()
    for i in range(30):
        system.addParticle(12.0)
        if i > 0:
            bonds.addBond(i - 1, i, 0.15, 1000.0)
        if i > 1:
            angles.addAngle(i - 2, i - 1, i, 1.9, 100.0)
        if i > 2:
            torsions.addTorsion(i - 3, i - 2, i - 1, i, 2, 0.3, 10.0)
    for force in (bonds, angles, torsions):
        system.addForce(force)
    positions = numpy.random.default_rng(1).random((30, 3)) * 0.05
    positions[:, 0] += numpy.arange(30) * 0.14
    compare(system, positions)


@pytest.mark.parametrize("precision", ["single", "mixed", "double"])
def test_water_with_cutoff(water, precision):
    model, field = water
    system = field.createSystem(
        model.topology, nonbondedMethod=app.CutoffPeriodic, nonbondedCutoff=0.9 * unit.nanometer
    )
    compare(system, model.positions, precision)
