//! The matrix of a run, models × methods × policies × tasks, as a TOML file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::tasks::is_known;
use crate::{Error, Result, RunOptions};

/// Least tokens that a LongBench prompt is cut to.
pub(crate) const MIN_PROMPT_TOKENS: usize = 16;

/// A run's matrix. Every task is answered by every model with every method and policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Matrix {
    /// Models, by name, address or path.
    pub models: Vec<String>,
    /// Fusion methods, with options if wanted. Vanilla is always among them.
    pub methods: Vec<String>,
    /// Eviction policies, with options if wanted. `full` is always among them.
    pub policies: Vec<String>,
    /// How documents lie in the store, `exact`, `q8` or `q4`: every method that reuses chunks answers with each.
    /// Without any, the engine's own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub store_dtype: Vec<String>,
    /// Tokens before every chunk while it is prefilled, `none`, `bos`, `system`, `averaged` or `text:FILE`: every method that reuses chunks
    /// answers with each. Without any, the engine's own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefix: Vec<String>,
    /// The part of the reused keys and values that is taken from the full prefill, `keys`, `values` or `chosen` (those of the tokens that a method
    /// recomputes, in place of recomputing them): every method that reuses chunks answers with each as well. It tells where the rest
    /// of an error lies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub oracle: Vec<String>,
    /// Folder of the benchmarks' data; generated tasks need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Most samples of a task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Most new tokens of an answer [default: the benchmark's].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Tokens that a LongBench prompt is cut to, in its middle; by the model's context if none (3,500 of 4k, 7,500 of
    /// 8k, 15,500 of 16k, 31,500 of 32k).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_prompt_tokens: Option<usize>,
    /// Seed of everything drawn.
    pub seed: u64,
    /// Tokens of vanilla's answer that others are forced to, to see how near they come.
    pub forced: usize,
    /// Whether attention is compared by layer as well.
    pub maps: bool,
    /// Answers to a sample that are decoded together: several are quicker, and have no time a token.
    pub batch: usize,
    /// Whether prompts go into the model's chat template, where the benchmark says so; a base model has none.
    pub chat: bool,
    /// The tasks.
    pub tasks: Vec<TaskSpec>,
}

impl Default for Matrix {
    fn default() -> Self {
        Matrix {
            models: Vec::new(),
            methods: vec!["vanilla".to_owned()],
            policies: vec!["full".to_owned()],
            store_dtype: Vec::new(),
            prefix: Vec::new(),
            oracle: Vec::new(),
            data: None,
            limit: None,
            max_tokens: None,
            max_prompt_tokens: None,
            seed: 42,
            forced: 32,
            maps: true,
            batch: 1,
            chat: true,
            tasks: Vec::new(),
        }
    }
}

/// A task or a suite of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaskSpec {
    /// `longbench/hotpotqa`, `longbench/a3` (a suite), `needle`, `ruler`, `ruler/vt`, `ruler/qa`, `rag/NAME`,
    /// `longgenbench/short`, `longwriter/en`, …
    pub name: String,
    /// Most samples, over the matrix's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Most new tokens, over the matrix's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Tokens of the contexts (needle, ruler).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lengths: Vec<usize>,
    /// Depths of the needle, evenly spaced over 0 to 100 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depths: Option<usize>,
    /// Protocol of the needle: `kv_papers`, `kvpress` or `kamradt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub style: Option<String>,
    /// Whether LongBench contexts stay one text, cut every chunk size of tokens as A³ does, and not at their own bounds.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub by_tokens: bool,
    /// A file of questions, for `ruler/qa` and `rag`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

impl TaskSpec {
    /// Keys that the benchmark reads beside `name`, `limit` and `max_tokens`.
    fn keys(&self) -> &'static [&'static str] {
        match self.name.split_once('/').unwrap_or((&self.name, "")) {
            ("needle", _) => &["lengths", "depths", "style"],
            ("ruler", "qa") => &["lengths", "file"],
            ("ruler", _) => &["lengths"],
            ("longbench", _) => &["by_tokens"],
            ("rag", _) => &["file"],
            _ => &[],
        }
    }

    /// The error of a name that does not exist.
    pub(crate) fn unknown(&self) -> Error {
        let separated = if self.name.contains(';') { "; several are separated by `,`" } else { "" };
        Error::Usage(format!("there is no task {:?}{separated}; `refrain eval tasks` lists them", self.name))
    }

    /// Whether the task is generated at lengths.
    pub fn has_lengths(&self) -> bool {
        self.keys().contains(&"lengths")
    }

    /// Refuses a name that does not exist, and keys that say nothing of the task.
    fn check(&self) -> Result<()> {
        if !is_known(&self.name) {
            return Err(self.unknown());
        }
        let given = [
            ("lengths", !self.lengths.is_empty()),
            ("depths", self.depths.is_some()),
            ("style", self.style.is_some()),
            ("by_tokens", self.by_tokens),
            ("file", self.file.is_some()),
        ];
        let (name, keys) = (&self.name, self.keys());
        let Some((key, _)) = given.iter().find(|(key, given)| *given && !keys.contains(key)) else {
            return Ok(());
        };
        let known = ["limit", "max_tokens"].iter().chain(keys).map(|key| format!("`{key}`"));
        let known = known.collect::<Vec<_>>().join(", ");
        Err(Error::Usage(format!("{name} has no key `{key}`: leave it out; the task's keys are {known}")))
    }
}

impl Matrix {
    /// Reads a matrix. Relative paths in it start from its folder; those of models do where such a file or folder is there.
    ///
    /// # Errors
    /// If the file cannot be read, or is no matrix: naming the line.
    pub fn read(path: &Path) -> Result<Matrix> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::data(path, error))?;
        let mut matrix: Matrix = toml::from_str(&text).map_err(|error| Error::data(path, error))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for model in &mut matrix.models {
            let beside = folder.join(&*model);
            // The name of a known model is no path.
            if Path::new(&*model).components().count() > 1 && beside.exists() {
                *model = beside.display().to_string();
            }
        }
        let files = matrix.tasks.iter_mut().filter_map(|task| task.file.as_mut());
        files.chain(matrix.data.as_mut()).for_each(|file| *file = folder.join(&*file));
        for prefix in &mut matrix.prefix {
            if let Some(file) = prefix.strip_prefix("text:") {
                *prefix = format!("text:{}", folder.join(file).display());
            }
        }
        Ok(matrix)
    }

    /// The matrix as TOML.
    pub fn text(&self) -> String {
        toml::to_string(self).unwrap_or_default()
    }

    /// The options of a run that the matrix says.
    pub fn run_options(&self, until: Option<Instant>) -> RunOptions {
        let Matrix { forced, maps, seed, batch, .. } = *self;
        RunOptions { forced, maps, seed, batch, until }
    }

    /// Checks the matrix before anything is opened.
    ///
    /// # Errors
    /// If there is nothing to do, or a number makes no sense.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Usage(why.to_owned()));
        if self.tasks.is_empty() {
            return refuse(
                "there is no task; give --tasks, or a matrix with [[tasks]] (`refrain eval tasks` lists them)",
            );
        }
        if self.models.is_empty() {
            return refuse("there is no model; give `models = [..]` in the matrix, or --model");
        }
        self.tasks.iter().try_for_each(TaskSpec::check)?;
        if let Some(folder) = self.data.as_deref().filter(|folder| !folder.is_dir()) {
            let reason =
                "there is no such folder of data; `refrain eval fetch` explains where data comes from";
            return Err(Error::data(folder, reason));
        }
        let zero = |task: &TaskSpec| {
            task.limit == Some(0)
                || task.max_tokens == Some(0)
                || task.depths == Some(0)
                || task.lengths.contains(&0)
        };
        if self.limit == Some(0) || self.max_tokens == Some(0) || self.tasks.iter().any(zero) {
            return refuse("limit, max_tokens, lengths and depths must be at least 1");
        }
        if let Some(tokens) = self.max_prompt_tokens.filter(|tokens| *tokens < MIN_PROMPT_TOKENS) {
            return refuse(&format!(
                "`max_prompt_tokens` must be at least {MIN_PROMPT_TOKENS}, not {tokens}"
            ));
        }
        if self.batch == 0 {
            return refuse("`batch` must be at least 1: so many answers are decoded together");
        }
        if self.forced == 0 {
            return refuse(
                "`forced` must be at least 1: it is over these tokens that methods are compared with vanilla",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_read_with_paths_from_its_own_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        let text = "models = ['a']\ndata = 'data'\nlimit = 3\n[[tasks]]\nname = 'ruler'\nlengths = [512]\n\
                    [[tasks]]\nname = 'rag/x'\nfile = '/abs/x.jsonl'\n";
        std::fs::write(&path, text).unwrap();
        let matrix = Matrix::read(&path).unwrap();
        assert_eq!(matrix.data.as_deref(), Some(folder.path().join("data").as_path()));
        assert_eq!(matrix.tasks[1].file.as_deref(), Some(Path::new("/abs/x.jsonl")));
        assert_eq!(
            (matrix.limit, matrix.forced, matrix.tasks[0].lengths.as_slice()),
            (Some(3), 32, &[512][..])
        );
        let error = matrix.check().unwrap_err().to_string();
        assert!(
            error.contains("data: there is no such folder") && error.contains("refrain eval fetch"),
            "{error}"
        );
        std::fs::create_dir(folder.path().join("data")).unwrap();
        assert!(matrix.check().is_ok());
        assert_eq!(toml::from_str::<Matrix>(&matrix.text()).unwrap(), matrix);
        for (tokens, good) in [(1, false), (15, false), (16, true)] {
            let checked = Matrix { max_prompt_tokens: Some(tokens), ..matrix.clone() }.check();
            assert_eq!(checked.is_ok(), good, "{tokens}");
            assert!(checked.err().is_none_or(|error| error.to_string().contains("`max_prompt_tokens`")));
        }
        std::fs::write(&path, "models = ['a']\nmethod = 'pie'\n").unwrap();
        let error = Matrix::read(&path).unwrap_err().to_string();
        assert!(error.contains("m.toml") && error.contains("method") && error.contains("line 2"), "{error}");
        assert!(Matrix::default().check().unwrap_err().to_string().contains("--tasks"));
    }

    #[test]
    fn models_beside_the_matrix_are_paths_and_names_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.toml");
        for model in ["models/tiny", "smollm2-135m", "hf:org/name"] {
            std::fs::create_dir_all(folder.path().join(model)).unwrap();
        }
        std::fs::remove_dir_all(folder.path().join("hf:org")).unwrap();
        let models = ["models/tiny", "models/none", "smollm2-135m", "hf:org/name"];
        std::fs::write(&path, format!("models = {models:?}\n")).unwrap();
        let beside = folder.path().join("models/tiny").display().to_string();
        assert_eq!(Matrix::read(&path).unwrap().models, [&[&*beside], &models[1..]].concat());
    }

    #[test]
    fn keys_that_a_task_does_not_read_are_refused_by_name() {
        let check = |text: &str| toml::from_str::<TaskSpec>(text).unwrap().check();
        for (name, keys) in [
            ("needle", "lengths = [9]\ndepths = 2\nstyle = 'kvpress'"),
            ("ruler/vt", "lengths = [9]\nlimit = 1"),
            ("ruler/qa", "lengths = [9]\nfile = 'x'"),
            ("longbench/a3", "by_tokens = true\nmax_tokens = 2"),
            ("rag/x", "file = 'x'"),
        ] {
            assert!(check(&format!("name = '{name}'\n{keys}\n")).is_ok(), "{name}");
        }
        for (name, key, value) in [
            ("longbench/hotpotqa", "file", "'x'"),
            ("longbench/hotpotqa", "lengths", "[9]"),
            ("longbench/hotpotqa", "style", "'x'"),
            ("ruler/vt", "depths", "3"),
            ("needle", "by_tokens", "true"),
            ("longwriter/en", "lengths", "[9]"),
        ] {
            let error = check(&format!("name = '{name}'\n{key} = {value}\n")).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} has no key `{key}`")), "{error}");
        }
    }

    #[test]
    fn tasks_that_do_not_exist_are_refused_before_their_keys() {
        let check =
            |name: &str| TaskSpec { name: name.to_owned(), lengths: vec![9], ..TaskSpec::default() }.check();
        for name in ["neddle", "ruler/none", "longbench/", "longbench/hotpot", "rag/", "needle;ruler"] {
            let error = check(name).unwrap_err().to_string();
            assert!(error.starts_with(&format!("there is no task {name:?}")), "{error}");
            assert_eq!(error.contains("separated by `,`"), name.contains(';'), "{error}");
        }
        for (name, _) in crate::tasks::names() {
            assert!(is_known(&name), "{name}");
        }
        assert!(is_known("longbench/hotpotqa_e") && is_known("longbench/hotpotqa_short"));
    }
}
