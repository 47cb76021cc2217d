//! The instruction set that the environment asks for. It is read once a process, so tests run this program again.

use std::process::Command;

use refrain_kernels::{Cpu, Isa, softmax};

use crate::{Rng, bits};

/// Variable under which [`results_of_this_process`] prints something.
const PRINT: &str = "REFRAIN_TEST_PRINT";

/// Output of [`results_of_this_process`] in a process with this instruction set.
fn results_with(isa: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "isa::results_of_this_process", "--nocapture", "--test-threads=1"]);
    let output = command.env("REFRAIN_CPU", isa).env(PRINT, "1").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let results = text.split_once("<<").and_then(|(_, rest)| rest.split_once(">>"));
    let (results, _) = results.unwrap_or_else(|| panic!("{isa}: {text}"));
    results.to_owned()
}

#[test]
fn results_of_this_process() {
    if std::env::var_os(PRINT).is_none() {
        return;
    }
    match Cpu::new(1) {
        Err(error) => println!("<<{error}>>"),
        Ok(cpu) => {
            let mut x = Rng::new(71).floats(1000);
            softmax(&mut x);
            println!("<<{} {:?}>>", cpu.isa(), bits(&x));
        }
    }
}

/// Functions that take no `Cpu` sum in the order of the set's vectors, so that their bits tell the set.
#[test]
fn free_functions_use_the_instruction_set_that_is_asked_for() {
    let portable = results_with("portable");
    assert!(portable.starts_with("portable "), "{portable}");
    if Isa::Avx512.available() {
        let avx512 = results_with("avx512");
        let (_, wide) = avx512.split_once(' ').unwrap();
        let (_, narrow) = portable.split_once(' ').unwrap();
        assert_ne!(wide, narrow, "both ran the same kernel");
    }
    assert_eq!(results_with("").split_once(' ').map(|r| r.0.parse::<Isa>().is_ok()), Some(true));
}

#[test]
fn an_instruction_set_that_is_unknown_or_missing_is_an_error() {
    let error = results_with("avx9");
    assert!(error.starts_with("REFRAIN_CPU: \"avx9\" is no instruction set; use one that it has"), "{error}");
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
        let error = results_with(isa.name());
        assert!(
            error.contains("this machine lacks the instruction set") && error.contains("unset"),
            "{error}"
        );
        assert!(Cpu::with_isa(1, isa).is_err());
    }
}
