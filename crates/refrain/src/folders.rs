//! Folders of the user's models, configuration and data, and paths as people write them.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Error, Result};

/// Folder of the user's configuration of this program.
pub fn config_folder() -> Option<PathBuf> {
    folder("XDG_CONFIG_HOME", "APPDATA", "Library/Application Support", ".config")
}

/// Folder of the user's data of this program: stored chunks, and what was found for a model.
pub fn data_folder() -> Option<PathBuf> {
    folder("XDG_DATA_HOME", "LOCALAPPDATA", "Library/Application Support", ".local/share")
}

/// Folder of the models that are known by name: `REFRAIN_MODELS`, or `~/.cache/refrain/models`.
///
/// # Errors
/// If neither the variable nor the home folder is set.
pub fn models_folder() -> Result<PathBuf> {
    let home = || std::env::home_dir().map(|home| home.join(".cache/refrain/models"));
    named("REFRAIN_MODELS").or_else(home).ok_or(Error::Home { what: "the folder of models" })
}

/// The folder that a variable names.
pub(crate) fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|folder| !folder.is_empty()).map(|folder| expand_tilde(folder.into()))
}

/// Writes a TOML file, and the folder that it lies in where there is none.
pub(crate) fn write_toml(path: &Path, value: &impl Serialize) -> Result<()> {
    let fail = |reason: String| Error::Kept { action: "write", file: tilde(path), reason };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(|error| fail(error.to_string()))?;
    }
    let text = toml::to_string(value).map_err(|error| fail(error.to_string()))?;
    std::fs::write(path, text).map_err(|error| fail(error.to_string()))
}

/// The folder that the variable `xdg` names on any platform, or else the platform's own.
fn folder(xdg: &str, windows: &str, mac: &str, other: &str) -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = |below: &str| std::env::home_dir().map(|home| home.join(below));
    let base = variable(xdg).or_else(|| {
        if cfg!(windows) {
            variable(windows)
        } else if cfg!(target_os = "macos") {
            home(mac)
        } else {
            home(other)
        }
    });
    base.map(|base| base.join("refrain"))
}

/// A path with `~` for the home folder, which [`expand_tilde`] makes the path again.
pub fn tilde(path: &Path) -> String {
    let below = std::env::home_dir().and_then(|home| path.strip_prefix(home).ok().map(Path::to_owned));
    let shown = match below {
        Some(below) => Path::new("~").join(below),
        // A folder of this name is not the home folder.
        None if path.starts_with("~") => Path::new(".").join(path),
        None => path.to_owned(),
    };
    shown.display().to_string()
}

/// A path whose first part is the home folder where that is `~`: no shell has expanded a path of a file or of a variable.
pub fn expand_tilde(path: PathBuf) -> PathBuf {
    let below_home = path.strip_prefix("~").ok().and_then(|below| Some(std::env::home_dir()?.join(below)));
    below_home.unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tilde_is_the_home_folder_at_the_beginning_alone() {
        let home = std::env::home_dir().unwrap();
        for (text, path) in [("~/st", home.join("st")), ("~", home.clone()), ("~//st", home.join("st"))] {
            assert_eq!(expand_tilde(PathBuf::from(text)), path, "{text}");
        }
        for text in ["./~/st", "a/~", "~st", "/~/st"] {
            assert_eq!(expand_tilde(PathBuf::from(text)), Path::new(text), "{text}");
        }
        assert_eq!(tilde(&home.join("st")), "~/st");
        assert_eq!(tilde(Path::new("~/st")), "./~/st");
        assert_eq!(tilde(Path::new("a/~")), "a/~");
    }
}
