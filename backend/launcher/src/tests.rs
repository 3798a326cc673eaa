use super::*;

#[test]
fn only_environment_variables_that_a_driver_needs_are_inherited() {
    for name in ["SLUICE_LOG", "SLUICE_SOFTGPU_MEMORY", "CUDA_CACHE_DISABLE"] {
        assert!(passes(name.as_ref()), "{name}");
    }
    for name in
        ["PATH", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "SLUICE_LOGS", "SLUICE_SOCKET", "CUDA", "XCUDA_"]
    {
        assert!(!passes(name.as_ref()), "{name}");
    }
}
