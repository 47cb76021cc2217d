use super::*;

fn device(index: usize, name: &str, compute_capability: (u32, u32)) -> NvidiaDevice {
    NvidiaDevice { index, name: name.to_owned(), compute_capability, multiprocessors: 100, memory: 1 << 34 }
}

#[test]
fn errors_say_what_is_missing() {
    let turing = device(1, "Tesla T4", (7, 5));
    let said = check_capability(&turing).unwrap_err().to_string();
    assert_eq!(
        said,
        "GPU 1, Tesla T4, has compute capability 7.5, and the kernels need 8.0 (Ampere) or later"
    );
    let said = check_version(12040).unwrap_err().to_string();
    assert_eq!(said, "NVIDIA's driver supports CUDA 12.4, and the kernels need 13.0: driver 580 or later");
    assert!(check_version(13000).and(check_version(13020)).is_ok());
    let hopper = device(0, "NVIDIA H100", (9, 0));
    assert!(check_capability(&hopper).is_ok());
    assert_eq!(
        no_such_gpu(2, &[hopper, turing]).to_string(),
        "there is no GPU 2; the GPUs here are 0: NVIDIA H100, 1: Tesla T4"
    );
}

#[test]
fn a_machine_without_a_driver_or_a_gpu_says_so() {
    match Nvidia::devices() {
        Ok(devices) => {
            let names: Vec<_> = devices.iter().map(|device| &device.name).collect();
            println!("skipped: this machine has GPUs: {names:?}");
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("driver is not installed") || text.contains("no NVIDIA GPU"), "{text}");
            assert_eq!(Nvidia::open(0).unwrap_err(), error);
        }
    }
}
