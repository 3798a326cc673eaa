"""OpenMM's own test of an installation: forces of a protein in water, with particle meshes, on all platforms."""

from openmm import testInstallation


def test_installation(capsys):
    testInstallation.run_tests()
    printed = capsys.readouterr().out
    assert "CUDA - Successfully computed forces" in printed, printed
    assert "All differences are within tolerance" in printed
