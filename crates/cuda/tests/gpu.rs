//! A GPU against the reference device, where there is one.
//!
//! `REFRAIN_TEST_GPU=1` says that there is one: then that it cannot be opened is a failure. `tools/gpu-check` carries this test to such a machine.

use refrain_kernels::conformance;

#[test]
fn every_call_on_a_gpu_computes_what_the_reference_device_does() {
    match refrain_cuda::open(0, 0) {
        Ok(device) => {
            println!("on {}", device.name());
            conformance::check(&*device);
        }
        Err(error) if std::env::var_os("REFRAIN_TEST_GPU").is_none() => println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    }
}
