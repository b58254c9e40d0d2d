#!/bin/sh
# Installs the Debian packages named as arguments that are not installed yet. Without root, or where there is no apt,
# it says which are missing and goes on: what needs them says so itself.
set -eu

missing=
for package in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
        installed) ;;
        *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing and not installed (that takes root and Debian's apt-get):$missing" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install="apt-get install --yes --no-install-recommends -qq"
# The lists may be old or absent; where they are good there is no need to fetch them.
# shellcheck disable=SC2086
$install $missing >/dev/null 2>&1 || { apt-get update -qq && $install $missing >/dev/null; }
