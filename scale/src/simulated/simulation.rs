//! The rates of a simulated worker.

use std::str::FromStr;

/// Rates of a simulated worker, and what it is taken for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Simulation {
    /// Tokens a second of prefill, one request at a time.
    pub(super) prefill: f64,
    /// Tokens a second of an answer; all answers are decoded together.
    pub(super) decode: f64,
    /// Bytes of a token's keys and values in a chunk file.
    pub(super) bytes: usize,
    /// Bytes a second out of the object store, and seconds until the first: what is fetched sooner than it really is is waited for.
    pub(super) remote: f64,
    pub(super) latency: f64,
    /// Number of the model. Models of other numbers share no chunk, and give other answers.
    pub(super) model: u8,
    /// Numerics of the answers: others give other answers.
    pub(super) numerics: String,
}

impl Default for Simulation {
    fn default() -> Simulation {
        let numerics = "simulated".to_owned();
        Simulation {
            prefill: 3000.0,
            decode: 200.0,
            bytes: 1024,
            remote: 1e8,
            latency: 0.02,
            model: 0,
            numerics,
        }
    }
}

impl FromStr for Simulation {
    type Err = String;

    fn from_str(text: &str) -> Result<Simulation, String> {
        let mut simulation = Simulation::default();
        for part in text.split(',') {
            let wrong = || {
                format!(
                    "{part:?} is none of prefill=N, decode=N, bytes=N, remote=N and latency=N with N above 0, model=N with N up to 255, \
                     and numerics=TEXT"
                )
            };
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
            match name {
                "prefill" => simulation.prefill = number().ok_or_else(wrong)?,
                "decode" => simulation.decode = number().ok_or_else(wrong)?,
                "bytes" => simulation.bytes = number().ok_or_else(wrong)? as usize,
                "remote" => simulation.remote = number().ok_or_else(wrong)?,
                "latency" => simulation.latency = number().ok_or_else(wrong)?,
                "model" => simulation.model = value.parse().map_err(|_| wrong())?,
                "numerics" => simulation.numerics = value.to_owned(),
                _ => return Err(wrong()),
            }
        }
        Ok(simulation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulations_are_read() {
        let text = "prefill=100,decode=50.5,bytes=64,remote=1000,latency=0.5,model=7,numerics=q8";
        let numerics = "q8".to_owned();
        let wanted = Simulation {
            prefill: 100.0,
            decode: 50.5,
            bytes: 64,
            remote: 1000.0,
            latency: 0.5,
            model: 7,
            numerics,
        };
        assert_eq!(text.parse(), Ok(wanted));
        assert_eq!("bytes=1024".parse(), Ok(Simulation::default()));
        for wrong in [
            "",
            "prefill",
            "prefill=0",
            "prefill=-1",
            "decode=inf",
            "speed=3",
            "prefill=1;decode=2",
            "model=256",
        ] {
            assert!(wrong.parse::<Simulation>().is_err(), "{wrong}");
        }
    }
}
