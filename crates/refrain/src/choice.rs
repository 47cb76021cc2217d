//! The method and prefix that `auto` stands for: what `refrain tune` found for the model, what is built in for a known one, or
//! settings near vanilla.

use std::path::{Path, PathBuf};

use refrain_engine::Prefix;
use refrain_fusion::METHODS;
use serde::{Deserialize, Serialize, Serializer};

use crate::folders::{tilde, write_toml};
use crate::models::KnownModel;
use crate::{Error, Result};

/// The word that asks for the choice.
pub const AUTO: &str = "auto";

/// The method and prefix of a model that nobody has tuned: near vanilla on all that was measured.
const UNKNOWN: (&str, &str) = ("drift:charge=0.3", "averaged");

/// The result of `refrain tune` for one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedFile {
    /// Name of the model, for people.
    pub model: String,
    /// Fingerprint of weights, configuration and precision.
    pub fingerprint: String,
    /// The method, with its options.
    pub method: String,
    /// The prefix of chunks.
    pub prefix: String,
    /// Share of vanilla's likeliest tokens and of its score that a method had to keep.
    pub bound: f64,
    /// Questions that it was found with.
    pub samples: usize,
    /// Share of positions with vanilla's likeliest token.
    pub top1: f64,
    /// Mean KL to vanilla, in nats.
    pub kl: f64,
    /// Score over vanilla's.
    pub score: f64,
    /// Documents' rows that were computed, as a share.
    pub charged: f64,
    /// Median of vanilla's time to the first token over the method's.
    pub speedup: f64,
}

impl TunedFile {
    /// Writes the file, and the folder that it lies in.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_toml(path, self)
    }

    fn read(path: &Path, fingerprint: &str) -> Result<TunedFile, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        let file: TunedFile = toml::from_str(&text).map_err(|error| error.to_string())?;
        if file.fingerprint != fingerprint {
            return Err(format!("it is of {}, or of another precision", file.model));
        }
        Ok(file)
    }
}

/// A method and a prefix, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// The method, with its options.
    pub method: String,
    /// The prefix of chunks.
    #[serde(serialize_with = "as_text")]
    pub prefix: Prefix,
    /// The reason.
    pub why: String,
}

impl Choice {
    /// The reason for the method where chunks lie behind `prefix`. The choice was made behind its own, which is told where that is another.
    pub fn why_behind(&self, prefix: &Prefix) -> String {
        let Choice { prefix: own, why, .. } = self;
        if prefix == own { why.clone() } else { format!("chosen behind prefix {own}, {why}") }
    }
}

fn as_text<S: Serializer>(prefix: &Prefix, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(prefix)
}

/// Path of the choice for a model, in the folder of the user's data. `fingerprint` is that of weights, configuration and precision.
///
/// # Errors
/// If the folder is not known.
pub fn tuned_path(data_folder: Option<&Path>, fingerprint: &str) -> Result<PathBuf> {
    let folder = data_folder.ok_or(Error::Home { what: "the file of the model's choice" })?;
    Ok(folder.join("tuned").join(format!("{fingerprint}.toml")))
}

/// The choice for a model of this name and fingerprint. `warn` is told of a file that cannot be used: no answer is wrong without it.
///
/// # Errors
/// If the built-in choice names no method or prefix.
pub fn choice(
    model: &str,
    fingerprint: &str,
    data_folder: Option<&Path>,
    warn: &mut dyn FnMut(&str),
) -> Result<Choice> {
    let path = tuned_path(data_folder, fingerprint).ok().filter(|path| path.exists());
    if let Some(path) = path {
        match TunedFile::read(&path, fingerprint).and_then(|file| tuned(&file)) {
            Ok(choice) => return Ok(choice),
            Err(reason) => warn(&format!("{} is not used: {reason}", tilde(&path))),
        }
    }
    let known = KnownModel::named(model);
    match known.and_then(|known| known.method.as_deref().zip(known.prefix.as_deref())) {
        Some((method, prefix)) => chosen(method, prefix, "built in for this model".to_owned()),
        None => {
            let why = "near vanilla, since the model is not known; `refrain tune` finds what is safe for it";
            chosen(UNKNOWN.0, UNKNOWN.1, why.to_owned())
        }
    }
    .map_err(Error::Choice)
}

fn tuned(file: &TunedFile) -> Result<Choice, String> {
    let (top1, samples) = (100.0 * file.top1, file.samples);
    let why = format!("tuned with {samples} questions: {top1:.1} % of vanilla's tokens");
    chosen(&file.method, &file.prefix, why)
}

fn chosen(method: &str, prefix: &str, why: String) -> Result<Choice, String> {
    // Answers name their method without options that are at their defaults.
    let method = METHODS.select(method).map_err(|error| error.to_string())?.spec;
    Ok(Choice { method, prefix: prefix.parse()?, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::KNOWN;

    #[test]
    fn built_in_choices_can_be_read() {
        let built_in = KNOWN.iter().filter_map(|known| known.method.as_deref().zip(known.prefix.as_deref()));
        for (method, prefix) in built_in.chain([UNKNOWN]) {
            METHODS.parse(method).unwrap();
            prefix.parse::<Prefix>().unwrap();
        }
        let text = format!("drift:charge={}", refrain_fusion::Drift::default().charge);
        assert_eq!(chosen(&text, "averaged", String::new()).unwrap().method, "drift", "as answers name it");
        assert!(KNOWN.iter().all(|known| known.method.is_some() == known.prefix.is_some()));
    }

    #[test]
    fn the_reason_tells_the_choices_prefix_where_chunks_lie_behind_another() {
        let choice = chosen("drift", "averaged", "built in".to_owned()).unwrap();
        assert_eq!(choice.why_behind(&Prefix::Averaged), "built in");
        assert_eq!(choice.why_behind(&Prefix::System), "chosen behind prefix averaged, built in");
    }

    #[test]
    fn a_tuned_file_is_of_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = tuned_path(Some(folder.path()), "abc").unwrap();
        let file = TunedFile {
            model: "m".to_owned(),
            fingerprint: "abc".to_owned(),
            method: "drift:charge=0.1".to_owned(),
            prefix: "system".to_owned(),
            bound: 0.98,
            samples: 20,
            top1: 0.99,
            kl: 0.01,
            score: 1.0,
            charged: 0.1,
            speedup: 5.0,
        };
        file.write(&path).unwrap();
        assert_eq!(TunedFile::read(&path, "abc").unwrap(), file);
        let error = TunedFile::read(&path, "abd").unwrap_err();
        assert!(error.contains("it is of m"), "{error}");
        let read = |warn: &mut dyn FnMut(&str)| choice("m", "abc", Some(folder.path()), warn).unwrap();
        assert_eq!(read(&mut |warning| panic!("{warning}")).method, "drift:charge=0.1");
        // A file of another version must not keep the model from answering.
        TunedFile { method: "pie:no-such=1".to_owned(), ..file }.write(&path).unwrap();
        let mut warnings = Vec::new();
        assert_eq!(read(&mut |warning| warnings.push(warning.to_owned())).method, UNKNOWN.0);
        assert!(
            warnings[0].contains("abc.toml is not used") && warnings[0].contains("no-such"),
            "{warnings:?}"
        );
    }
}
