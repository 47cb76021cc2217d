//! Folders of the user's configuration and data, and paths as people write them.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;

/// Folder of the user's configuration of this program.
pub(crate) fn config_folder() -> Option<PathBuf> {
    folder("XDG_CONFIG_HOME", "APPDATA", "Library/Application Support", ".config")
}

/// Folder of the user's data of this program.
pub(crate) fn data_folder() -> Option<PathBuf> {
    folder("XDG_DATA_HOME", "LOCALAPPDATA", "Library/Application Support", ".local/share")
}

/// Writes a TOML file, and the folder that it lies in where there is none.
pub(crate) fn write_toml(path: &Path, value: &impl Serialize) -> Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    std::fs::write(path, toml::to_string(value)?).with_context(|| format!("cannot write {}", path.display()))
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

/// A path with `~` for the home folder.
pub(crate) fn tilde(path: &Path) -> String {
    let below = std::env::home_dir().and_then(|home| path.strip_prefix(home).ok().map(Path::to_owned));
    below.map_or_else(|| path.display().to_string(), |below| Path::new("~").join(below).display().to_string())
}
