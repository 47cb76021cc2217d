//! `--device`: what the program says where there is no GPU.

use super::Home;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");
/// A question that the tiny model needs no document for.
const ASK: [&str; 6] = ["ask", "--model", TINY, "--max-tokens", "2", "Why?"];

/// Whether the driver shows a GPU here, where these tests have nothing to say.
fn has_gpu() -> bool {
    let has = std::path::Path::new("/proc/driver/nvidia/version").exists();
    if has {
        println!("skipped: this machine has a driver of NVIDIA");
    }
    has
}

#[test]
fn auto_computes_on_the_cpu_without_a_word_where_there_is_no_gpu() {
    let (home, other) = (Home::new(), Home::new());
    let auto = home.run(&[&ASK[..], &["--device", "auto", "--quiet"]].concat()).good();
    if !has_gpu() {
        assert_eq!(auto.err, "");
        assert_eq!(auto.out, other.run(&[&ASK[..], &["--quiet"]].concat()).good().out);
    }
}

#[test]
fn cuda_says_what_is_missing() {
    if has_gpu() {
        return;
    }
    let home = Home::new();
    for (device, more) in [("cuda", "cannot compute on cuda: "), ("cuda:3", "cannot compute on cuda:3: ")] {
        let ran = home.run(&[&ASK[..], &["--device", device]].concat());
        let ran = ran.failed(1, &[more, "NVIDIA", "--device cpu needs neither a GPU nor a driver"]);
        assert_eq!(ran.out, "");
    }
    home.run(&["serve", "--model", TINY, "--port", "0", "--device", "cuda"])
        .failed(1, &["cannot compute on cuda: "]);
    let mut by_environment = home.command(&ASK);
    let ran = super::Ran::of(by_environment.env("REFRAIN_DEVICE", "cuda").output().unwrap());
    ran.failed(1, &["cannot compute on cuda: "]);
}

#[test]
fn an_unknown_device_is_told_with_the_choices() {
    let home = Home::new();
    let ran = home.run(&[&ASK[..], &["--device", "gpu"]].concat());
    ran.failed(2, &["--device <DEVICE>", "unknown device \"gpu\": use cpu, cuda, cuda:N", "auto"]);
    let help = home.run(&["ask", "--help"]).good().out;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("--device <DEVICE>") && help.contains("cuda is experimental"), "{help}");
}
